"""Line protocols between commands or services and the programs that they start."""
