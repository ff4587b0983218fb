"""What the CLI runs beside the daemon: work on devices, run, the demo, references."""
