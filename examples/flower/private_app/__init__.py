"""An ordinary Flower app: `client_app` is a site, `server_app` the server."""
