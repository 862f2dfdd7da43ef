"""How kvferry's processes find and reach each other on one machine: paths, links over ZeroMQ, tethers."""
