"""One step of both runs: what is known of it, what rests on what in it, what came out of it."""
