"""What a comparison speaks of: sites and their names, the table, evidence, findings, the result."""
