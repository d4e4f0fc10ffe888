"""Ports to the outside world and small building blocks that everything else uses."""
