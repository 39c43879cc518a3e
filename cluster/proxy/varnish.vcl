# Varnish before a Corral on this machine, behind something that has the certificate. It caches nothing of Corral, and passes bytes on both
# ways. Start it with -p pipe_timeout=3600: an answer that is not streamed sends nothing before its end.
vcl 4.1;

backend corral {
    .host = "127.0.0.1";
    .port = "8000";
}

sub vcl_recv {
    return (pipe);  # with `pass`, Corral would compute on for clients that left
}

sub vcl_pipe {
    set bereq.http.Connection = "close";  # the next request goes through this file again
}
