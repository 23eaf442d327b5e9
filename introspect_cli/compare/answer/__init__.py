"""The answer of a comparison from all ranks' outcomes: verdict, sentence, causes and notes."""
