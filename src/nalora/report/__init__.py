"""What came of runs, for people: one HTML file that explains itself."""
