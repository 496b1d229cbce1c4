"""Several engines, in processes or on Ray: which one a request goes to, their devices and restarts."""
