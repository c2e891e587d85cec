// java Client.java URL BODY: asks as Java's own client does by default, in the clear by an upgrade with a body. Prints the
// protocol, and then the lines as they come; a second request goes over the connection that was upgraded.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.stream.Stream;

public class Client {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                .header("content-type", "application/json")
                .POST(BodyPublishers.ofString(arguments[1]))
                .build();
        for (int i = 0; i < 2; i++) {
            HttpResponse<Stream<String>> response = client.send(request, BodyHandlers.ofLines());
            System.out.println(response.version() + " " + response.statusCode());
            response.body().forEach(System.out::println);
        }
    }
}
