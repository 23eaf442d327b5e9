"""Both runs side by side: how they are split up, sites, steps, distance, and what ranks share out."""
