"""The anchor: when it fires, what it remembers, how its gradient is merged."""
