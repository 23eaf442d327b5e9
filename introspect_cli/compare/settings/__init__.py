"""What two runs were asked, given and began with, and what of it explains a divergence."""
