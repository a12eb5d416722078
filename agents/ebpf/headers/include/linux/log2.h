/* Asked for by bcc; nothing of it is used. */
