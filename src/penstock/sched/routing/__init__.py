"""Which replica gets a request. Plain classes that know no cluster: the simulation runs the same objects."""
