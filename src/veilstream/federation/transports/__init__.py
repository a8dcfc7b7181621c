"""What carries a federation's messages: bytes there, bytes back."""
