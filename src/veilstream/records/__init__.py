"""What a record is: its schema and encoding, who a client is, and which records are admitted."""
