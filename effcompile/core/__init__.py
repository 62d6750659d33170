"""What everything stands on: errors, units, files, timing, costs, goals, and torch's private APIs."""
