"""What a capture knows of the other processes of a launch: never by asking them."""
