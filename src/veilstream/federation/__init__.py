"""Server and learners as processes: protocol, identity, services, transports."""
