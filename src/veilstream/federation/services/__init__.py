"""The long-lived processes of a federation, and what each is made of."""
