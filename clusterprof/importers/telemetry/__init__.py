"""What monitoring systems keep of nodes and devices: readings of their names become our signals."""
