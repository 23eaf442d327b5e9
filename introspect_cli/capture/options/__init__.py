"""What a capture is asked to do."""
