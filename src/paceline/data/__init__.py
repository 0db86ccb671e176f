"""Where samples come from and how they reach the device."""
