"""What a training framework calls the step that runs, read from its own objects."""
