"""What a resumed run goes on with, part by part: restored, not restored, or not recorded."""
