"""Activity of one rank over time: busy and idle intervals by kernel type, steps, and the call tree."""
