"""The back end `ray`: ranks as Ray actors hold weights and optimizer, on this machine or on a cluster."""
