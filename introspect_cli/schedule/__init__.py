"""Which steps are meant, as people write them."""
