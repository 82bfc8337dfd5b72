"""What this node can record and what in its environment should change, for `clusterprof doctor`."""
