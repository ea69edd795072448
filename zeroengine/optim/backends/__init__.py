"""The implementations of the optimizer update: Adam on the host, Adam on the device, any torch optimizer."""
