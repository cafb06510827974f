// Scores a batch with a program of te.export(run, folder, target="aten"), without Python.
// g++ -std=c++20 score.cpp -I$TORCH/include -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10 -o score
#include <ATen/ATen.h>
#include <iostream>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader program(std::string(argv[1]) + "/model.pt2");
  int num_dense = std::stoi(argv[2]), num_features = std::stoi(argv[3]);  // of inputs.json
  std::vector<at::Tensor> inputs{at::ones({2, num_dense})};
  for (int feature = 0; feature < num_features; ++feature) {
    inputs.push_back(at::tensor({1, 2, 3}, at::kLong));  // ids of both samples
    inputs.push_back(at::tensor({0, 1}, at::kLong));     // where they begin: one id, then two
  }
  at::Tensor scores = program.run(inputs)[0];
  std::cout << scores[0].item<float>() << " " << scores[1].item<float>() << "\n";
}
