"""What a run leaves behind: its folder, the trained model, charts and the report."""
