"""Results as text: console, JSON, YAML."""
