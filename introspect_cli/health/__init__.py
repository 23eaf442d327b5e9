"""Rules over one run: what usually goes wrong in training, and the records that show it."""
