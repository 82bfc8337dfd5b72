"""How a job is started under `record`: probe injection, election of one recorder per node."""
