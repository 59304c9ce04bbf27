"""What a run is: its settings, its folder, its lock, its inputs; shared by training, evaluation and studies."""
