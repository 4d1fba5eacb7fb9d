"""Other libraries, through their own plug-in interfaces."""
