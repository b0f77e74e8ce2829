"""Activity over time on one rank: busy and idle intervals, and the call tree."""
