"""Why the first divergence is one: what is looked up, and the sentence."""
