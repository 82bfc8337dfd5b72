"""Disks, network mounts and Lustre clients as the kernel reports them."""
