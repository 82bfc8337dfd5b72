"""Network interfaces, sockets, netlink and RDMA ports as the kernel reports them."""
