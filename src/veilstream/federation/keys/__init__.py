"""Identities, certificates and access tokens."""
