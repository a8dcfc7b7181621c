"""A stock Flower app carries the federation's messages, by Flower's public API alone.

    learner's machine                                        server's machine
    daemon  <-socket->  client_app in a SuperNode  <-TLS->   SuperLink  ->  server_app
    its own account     another account

`flwr run` submits the app's folder to a SuperLink, which runs the ServerApp and has SuperNodes run
the ClientApp. Anyone who can submit an app runs code there. So a SuperNode has an account of its own,
which can read nothing of the learner's.
"""

__all__ = ["RECORD", "REPLY", "REQUEST"]

RECORD, REQUEST, REPLY = "veilstream", "request", "reply"
"""Names in a Flower message: the record, and the bytes in it."""
