"""A stock Flower app carries the federation's messages, by Flower's public API alone.

    learner's machine                                        server's machine
    daemon  <-socket->  client_app in a SuperNode  <-TLS->   SuperLink  ->  server_app
    its own account     another account

`flwr run` submits the app's folder to a SuperLink, which runs the ServerApp and has SuperNodes run
the ClientApp. Anyone who can submit an app runs code there. So a SuperNode has an account of its own,
which can read nothing of the learner's.

    app_folder.py      the folder that `flwr run` submits
    server_app.py      ServerApp: the server's service over a grid
    grid_transport.py  Flower's grid as a `Transport`
    client_app.py      ClientApp: bytes to the daemon's socket and back
    carrier_socket.py  the learner's socket, and who may use it
    local.py           SuperLink and SuperNodes on this machine, for the demo, studies and tests
"""

__all__ = ["RECORD", "REPLY", "REQUEST"]

RECORD, REQUEST, REPLY = "veilstream", "request", "reply"
"""Names in a Flower message: the record, and the bytes in it."""
