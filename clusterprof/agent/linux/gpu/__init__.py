"""What /sys and fdinfo tell about AMD and Intel GPUs and about the processes that use a GPU."""
