"""What machines can do, as data: targets, hardware, calibration, the C++ compiler."""
