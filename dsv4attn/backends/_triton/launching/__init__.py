"""From arguments to a compiled kernel on a device, once and over and over."""
