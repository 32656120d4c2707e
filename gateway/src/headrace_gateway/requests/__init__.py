"""What a request says: its body, identity and context, checked and in the form that the gateway works with."""
