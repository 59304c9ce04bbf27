"""Reports of runs and studies: an HTML page, figures and tables."""
