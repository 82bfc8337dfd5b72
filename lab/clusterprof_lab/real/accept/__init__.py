"""Nine acceptance scenarios on two nodes, judged by the stopwatches of the job itself."""
