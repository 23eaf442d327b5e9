"""What came out of all ranks as one answer: the verdict, the sentence, what stands beside it."""
