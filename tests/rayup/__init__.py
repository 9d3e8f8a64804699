"""`ray up` with the shipped file for real, on hosts that are namespaces: `make test-rayup`, as root."""
