"""FlashHopper behind other packages' interfaces; each module needs its package and is imported by name."""
