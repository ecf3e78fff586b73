"""What runs show: histories, alarms, paired gains, whether joining is worth it."""
